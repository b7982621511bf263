"""What the figures of the pages share."""

SMALL = 9  # points
