"""What ranks do in tests, a function a rank."""
