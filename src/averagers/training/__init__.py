"""How averaging joins a training loop: on an optimizer's step, as an optimizer, in DDP's backward."""
