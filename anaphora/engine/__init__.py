"""The loop around the control plane: requests in, text out. Knows no tensors, no models, no sockets."""
