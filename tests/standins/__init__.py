"""Small models with the structure of checkpoints' own modelling code, for tests on the CPU."""
