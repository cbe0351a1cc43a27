/* A CUDA runtime that does nothing, for tests/gpu/fake.py: one H100, whose memory is the host's and
   whose work is done as soon as it is queued. What is not here does nothing either, and says that
   all went well: fake.py adds it, as it asks torch's libraries which functions they call. */
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

typedef void *Handle;
static unsigned long handles = 1;
static int make(Handle *made) { *made = (Handle)(handles++ * 16); return 0; }
static int allocate(Handle *memory, size_t size) { *memory = calloc(1, size); return 0; }
static int set(int *value, int to) { *value = to; return 0; }

int cudaGetDeviceCount(int *count) { return set(count, 1); }
int cudaGetDevice(int *device) { return set(device, 0); }
int cudaDriverGetVersion(int *version) { return set(version, 13000); }
int cudaRuntimeGetVersion(int *version) { return set(version, 13000); }
int cudaDeviceGetAttribute(int *value, int which, int device) { return set(value, 0); }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return set(can, 0); }
int cudaDeviceGetStreamPriorityRange(int *least, int *most) { set(most, -5); return set(least, 0); }
int cudaGetDeviceProperties(struct cudaDeviceProp *about, int device) {
    memset(about, 0, sizeof *about);
    strcpy(about->name, "NVIDIA H100 80GB HBM3");
    about->totalGlobalMem = 80ul << 30;
    about->major = 9;
    about->multiProcessorCount = 132;
    about->maxThreadsPerMultiProcessor = 2048;
    about->maxThreadsPerBlock = 1024;
    about->warpSize = 32;
    about->sharedMemPerBlock = 48 << 10;
    about->sharedMemPerBlockOptin = 227 << 10;
    about->regsPerMultiprocessor = 65536;
    about->l2CacheSize = 50 << 20;
    return 0;
}
int cudaMemGetInfo(size_t *free_, size_t *total) { *free_ = *total = 80ul << 30; return 0; }
int cudaMalloc(Handle *memory, size_t size) { return allocate(memory, size); }
int cudaMallocHost(Handle *memory, size_t size) { return allocate(memory, size); }
int cudaHostAlloc(Handle *memory, size_t size, unsigned flags) { return allocate(memory, size); }
int cudaFree(Handle memory) { free(memory); return 0; }
int cudaFreeHost(Handle memory) { free(memory); return 0; }
int cudaMemcpy(Handle to, Handle from, size_t size, int kind) { memmove(to, from, size); return 0; }
int cudaMemcpyAsync(Handle to, Handle from, size_t size, int kind, Handle stream) {
    memmove(to, from, size);
    return 0;
}
int cudaMemset(Handle at, int value, size_t size) { memset(at, value, size); return 0; }
int cudaMemsetAsync(Handle at, int value, size_t size, Handle stream) {
    memset(at, value, size);
    return 0;
}
int cudaStreamCreate(Handle *stream) { return make(stream); }
int cudaStreamCreateWithFlags(Handle *stream, unsigned flags) { return make(stream); }
int cudaStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) { return make(stream); }
int cudaStreamGetPriority(Handle stream, int *priority) { return set(priority, 0); }
int cudaStreamIsCapturing(Handle stream, int *status) { return set(status, 0); }
int cudaStreamGetCaptureInfo(Handle stream, int *status) { return set(status, 0); }
int cudaEventCreate(Handle *event) { return make(event); }
int cudaEventCreateWithFlags(Handle *event, unsigned flags) { return make(event); }
int cudaEventElapsedTime(float *milliseconds, Handle begin, Handle end) {
    *milliseconds = 1;
    return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return set(active, 1); }
int cuCtxGetCurrent(Handle *context) { *context = (Handle)16; return 0; }
const char *cudaGetErrorName(int error) { return "cudaSuccess"; }
const char *cudaGetErrorString(int error) { return "no error"; }
