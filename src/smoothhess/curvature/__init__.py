"""What is known of the curvature of the model's own activations before anything is sampled."""
