"""Training of a draft from nothing but the main model: its texts, what it computes for them, a draft, a verdict."""
