"""The pictures of the design pages: NAME.py has NAME(), which returns a Vega-Lite chart."""
