"""What runs on CUDA alone, held on a CPU: decisions, arithmetic and orders, no kernel."""
