"""Draft heads over the target's hidden states (EAGLE-3, P-EAGLE, DFlash, DSpark, MTP) and PARD."""
