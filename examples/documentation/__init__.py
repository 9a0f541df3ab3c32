"""Documentation: an agent that searches, opens and answers; a pretrained model learns it."""
