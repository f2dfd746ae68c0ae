"""The user's model → values and gradients; the model is given back as it was."""
