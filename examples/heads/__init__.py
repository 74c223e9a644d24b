"""An EAGLE-3 head for the bundled target, in the format of the speculators library, and its training."""
