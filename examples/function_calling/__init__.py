"""Function calling: a pretrained model learns to call the functions of a public benchmark."""
