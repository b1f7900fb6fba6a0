"""Published measurements as jobs: what a row of a set says, as a request, and what is predicted for it."""
