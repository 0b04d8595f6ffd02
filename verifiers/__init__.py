"""Rules that turn draft trees and the target's laws into committed tokens."""
