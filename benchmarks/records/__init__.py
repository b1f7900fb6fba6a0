"""Records of what real training code issues: reading them, synthesizing the same job, comparing the two."""
