"""An e-mail search agent over a synthetic inbox: tools, reward and a small base model to train."""
