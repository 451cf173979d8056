"""What the command line runs beside `build`: bench, tune, verify, show, report."""
