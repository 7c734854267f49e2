"""Policy versions, their artifacts, and the activations that switch the pointer."""
