"""A judge of known faults, groups of known quality, and ART's released RULER as a child process."""
