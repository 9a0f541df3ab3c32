"""What `benchmarks.gateway` starts: a client, engines that answer at once, our server."""
