"""Where the figures and samples of a run go beside its folder: one small class a service."""
