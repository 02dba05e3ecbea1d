"""Other libraries' call signatures over jaxbuf's buffers."""
