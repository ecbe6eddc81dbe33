"""Matrix products in Triton, with the ops that are fused into them. Importing a module imports triton."""
