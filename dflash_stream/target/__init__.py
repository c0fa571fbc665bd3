"""The target model: which decoder layers are tapped, how it is loaded, how their outputs are read."""
