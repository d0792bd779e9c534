"""monetrun in other packages' trainers: one module for each package, which imports it; nothing else does."""
