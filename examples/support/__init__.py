"""What the examples share: their small base models, the demo's runner, and the evaluation."""
