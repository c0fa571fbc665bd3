"""The target model: which of its decoder layers are tapped, how it is loaded, and how their outputs are read."""
