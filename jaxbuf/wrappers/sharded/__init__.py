"""One buffer over the devices along an axis of a mesh."""
