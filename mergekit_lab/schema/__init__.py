"""What a configuration may say, and how it is checked before any work."""
