"""What both packages build on: errors, a model's shape, files read with care. Imports no other room."""
