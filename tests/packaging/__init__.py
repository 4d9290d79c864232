"""The shipped artefacts: the wheel, the lock files, the image, compose.yaml and its example shop."""
