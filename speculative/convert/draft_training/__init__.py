"""Training of a draft from the main model alone: texts, states, training, verdict."""
