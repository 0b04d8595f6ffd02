"""Other runtimes that serve with this project's draft trees and verifiers."""
