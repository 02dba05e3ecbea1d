"""The host side: checkpoints, data on disk, and what a Python loop needs beside it."""
