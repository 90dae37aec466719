"""What the library does with any `nn.Module`: which tensors travel, how it is copied and inspected."""
