"""Rules that turn draft trees and the target's distributions into committed tokens."""
