"""Traces of the Hessian, of the Gauss-Newton matrix and of the empirical Fisher, each with its standard error."""
