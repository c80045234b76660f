"""kernelgen in the place of other libraries' attention; each module imports the library that it is named after."""
