"""Other runtimes that can serve with this project's draft trees and verifiers."""
