"""The methods that come with specbench, one file each; the file's name is the method's name."""
