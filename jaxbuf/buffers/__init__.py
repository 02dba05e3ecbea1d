"""The pytrees people hold: composed of the core and the strategies."""
