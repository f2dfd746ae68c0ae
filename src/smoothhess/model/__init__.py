"""Values and gradients of the user's model, whose state is restored afterwards."""
