// The calls of CUDA's runtime that a compiled library makes, where the device is the host.
//
// Memory is the host's, so copies are copies. A launch is handed on, with the kernel's name and the
// module it was compiled into.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } dim3;
typedef int status;
typedef status (*launcher)(const char *name, const void *module, const unsigned *grid,
                           const unsigned *block, void **arguments, uint64_t shared_bytes);

static launcher launch_on_host;
static int processors;

void host_device(launcher function, int multiprocessors) {
  launch_on_host = function;
  processors = multiprocessors;
}

// Modules and kernels, registered when a library is loaded.

typedef struct { const void *stub; const char *name; const void *module; } kernel;
static kernel *kernels;
static size_t kernel_count, kernel_room;

typedef struct { int magic, version; const void *data; void *unused; } module_wrapper;

const void **__cudaRegisterFatBinary(const module_wrapper *wrapper) {
  const void **handle = malloc(sizeof *handle);
  *handle = wrapper->data;
  return handle;
}

void __cudaRegisterFatBinaryEnd(const void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(const void **handle) { (void)handle; }
void __cudaRegisterVar(void) {}

void __cudaRegisterFunction(const void **handle, const void *stub, char *unused, const char *name) {
  (void)unused;
  if (kernel_count == kernel_room) {
    kernel_room = kernel_room ? 2 * kernel_room : 256;
    kernels = realloc(kernels, kernel_room * sizeof *kernels);
  }
  kernels[kernel_count++] = (kernel){stub, strdup(name), *handle};
}

// Launches, by each of the ways that compilers and libraries take.

static status launch(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared) {
  for (size_t i = 0; i < kernel_count; i++)
    if (kernels[i].stub == stub)
      return launch_on_host(kernels[i].name, kernels[i].module, &grid.x, &block.x, arguments, shared);
  return 98;  // cudaErrorInvalidDeviceFunction
}

static struct { dim3 grid, block; size_t shared; void *stream; } pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared = shared;
  pushed.stream = stream;
  return 0;
}

status __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *stream = pushed.stream;
  return 0;
}

status __cudaGetKernel(const void **found, const void *stub) {
  *found = stub;
  return 0;
}

status __cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                          void *stream) {
  (void)stream;
  return launch(stub, grid, block, arguments, shared);
}

status cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                        void *stream) {
  (void)stream;
  return launch(stub, grid, block, arguments, shared);
}

typedef struct { dim3 grid, block; size_t shared; } launch_config;

status cudaLaunchKernelExC(const launch_config *config, const void *stub, void **arguments) {
  return launch(stub, config->grid, config->block, arguments, config->shared);
}

// Everything else.

status cudaGetDevice(int *device) { return *device = 0; }
status cudaSetDevice(int device) { return device != 0; }
status cudaGetLastError(void) { return 0; }
status cudaFuncSetAttribute(void) { return 0; }
status cudaStreamSynchronize(void) { return 0; }
const char *cudaGetErrorName(status error) { return error ? "error" : "success"; }
const char *cudaGetErrorString(status error) { return cudaGetErrorName(error); }

status cudaMemcpyAsync(void *to, const void *from, size_t bytes) {
  memcpy(to, from, bytes);
  return 0;
}

status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) {
  *blocks = 2;
  return 0;
}

status cudaDeviceGetAttribute(int *value, int attribute) {  // as of an H100
  switch (attribute) {
    case 16: *value = processors; return 0;
    case 75: *value = 9; return 0;        // compute capability
    case 76: *value = 0; return 0;
    case 81: *value = 233472; return 0;   // shared memory of a multiprocessor
    case 97: *value = 232448; return 0;   // and of a block, at most
  }
  fprintf(stderr, "the host stands in for a device without attribute %d\n", attribute);
  return 1;
}
