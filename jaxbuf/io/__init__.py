"""The host side: checkpoints, data on disk, and a holder that threads share."""
