"""Training of an EAGLE-3 draft from nothing but the main model: its texts, their hidden states, the head, a verdict."""
