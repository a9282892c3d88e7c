"""`anaphora bench`: the same requests to one or more targets in turn, and what the measurements do and do not show."""
