"""Traces of Hessian, Gauss-Newton matrix and empirical Fisher, with their standard errors."""
