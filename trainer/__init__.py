"""Pure maths and torch: generation for measuring, and the cold start of the tiny policy."""
