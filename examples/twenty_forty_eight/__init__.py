"""2048 on a board of three by three: one run is a game of many moves, rewarded by its tiles."""
