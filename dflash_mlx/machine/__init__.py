"""What this machine is: its BLAS, its chip, its folders, its software."""
