"""What `benchmarks.page` needs: a database of many runs, a chromium that is timed, viewers."""
