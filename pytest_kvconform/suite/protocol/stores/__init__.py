"""Cases about stores: what the scheduler half announces for prompts that were saved."""
