/* A stand-in for libnvidia-ml.so.1: the calls that are made of it, answered from the file that $STANDIN_CARDS names.

   The file is read again at each call. What its lines mean is in __init__.py beside this. */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK, UNINITIALIZED, INVALID, UNSUPPORTED, NOT_FOUND = 6, TOO_SMALL, NO_DRIVER = 9 };
enum { MOST = 256 };

typedef unsigned long long bytes;
typedef char *device; /* its place among the cards' lines, plus one, as a pointer that nobody follows */
typedef struct { bytes total, free, used; } memory;
typedef struct { unsigned version; bytes total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; bytes used; unsigned gpu_instance, compute_instance; } process;

static char text[1 << 16];
static char *cards[MOST], *processes[MOST], *driver;
static int card_count, process_count, begun, epoch;

static const char *value(const char *line, const char *key)
{
    char wanted[64];
    const char *found;
    snprintf(wanted, sizeof wanted, " %s=", key);
    found = line ? strstr(line, wanted) : NULL;
    return found ? found + strlen(wanted) : NULL;
}

static double number(const char *line, const char *key, double otherwise)
{
    const char *found = value(line, key);
    return found ? strtod(found, NULL) : otherwise;
}

static int word(const char *line, const char *key, char *buffer, unsigned size)
{
    const char *found = value(line, key);
    unsigned length = found ? strcspn(found, strcmp(key, "name") ? " \n" : "\n") : 0;
    if (!found || length >= size)
        return found ? TOO_SMALL : UNSUPPORTED;
    memcpy(buffer, found, length);
    buffer[length] = 0;
    return OK;
}

static int read_file(void)
{
    const char *path = getenv("STANDIN_CARDS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    char *line, *rest = text;
    if (file >= 0)
        close(file);
    if (length < 0)
        return NO_DRIVER;
    text[length] = 0;
    card_count = process_count = 0;
    driver = NULL;
    while ((line = strsep(&rest, "\n")))
        if (!strncmp(line, "driver ", 7))
            driver = line;
        else if ((!strncmp(line, "gpu ", 4) || !strncmp(line, "mig ", 4)) && card_count < MOST)
            cards[card_count++] = line;
        else if (!strncmp(line, "process ", 8) && process_count < MOST)
            processes[process_count++] = line;
    while (number(driver, "hang", 0))
        pause();
    return OK;
}

static int ask(void)
{
    int answer = begun ? read_file() : UNINITIALIZED;
    if (!answer && number(driver, "epoch", 0) != epoch)
        return UNINITIALIZED;
    return answer;
}

static int ask_of(device of, const char *fault, const char **line)
{
    char key[64];
    int answer = ask();
    if (answer)
        return answer;
    if (of == NULL || of - (char *)0 > card_count)
        return INVALID;
    *line = cards[of - (char *)0 - 1];
    snprintf(key, sizeof key, "%s_fault", fault);
    return (int)number(*line, key, OK);
}

static int nth(const char *kind, int from, unsigned wanted, device *found)
{
    for (int i = from; i < card_count; i++) {
        if (*kind == 'm' && *cards[i] == 'g')
            break; /* the instances of the next GPU */
        if (*kind == *cards[i] && wanted-- == 0) {
            *found = (char *)0 + i + 1;
            return (int)number(cards[i], "fault", OK);
        }
    }
    return *kind == 'm' ? NOT_FOUND : INVALID;
}

/* A process that is gone has no memory on a GPU; nor has one that is only waited for. */
static int lives(const char *line)
{
    char path[64], stat[512];
    int file;
    ssize_t length;
    char *after;
    if (number(line, "elsewhere", 0))
        return 1;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)number(line, "pid", 0));
    file = open(path, O_RDONLY | O_CLOEXEC);
    length = file < 0 ? -1 : read(file, stat, sizeof stat - 1);
    if (file >= 0)
        close(file);
    if (length <= 0)
        return 0;
    stat[length] = 0;
    after = strrchr(stat, ')');
    return after && after[2] != 'Z' && after[2] != 'X';
}

static int is_on(const char *line, device of)
{
    char on[128], uuid[128];
    int i = of - (char *)0 - 1;
    if (word(line, "on", on, sizeof on) || !lives(line))
        return 0;
    do
        if (!word(cards[i], "uuid", uuid, sizeof uuid) && !strcmp(on, uuid))
            return 1;
    while (*cards[of - (char *)0 - 1] == 'g' && ++i < card_count && *cards[i] == 'm'); /* its instances' too */
    return 0;
}

int nvmlInitWithFlags(unsigned flags)
{
    int answer = read_file();
    (void)flags;
    if (answer || (answer = (int)number(driver, "init_fault", OK)))
        return answer;
    if (!begun++) /* else it is counted, and nothing is done */
        epoch = (int)number(driver, "epoch", 0);
    return OK;
}

int nvmlInit(void) { return nvmlInitWithFlags(0); }

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    if (!begun)
        return UNINITIALIZED;
    begun--;
    return OK;
}

const char *nvmlErrorString(int code)
{
    static char words[64];
    snprintf(words, sizeof words, "Error %d", code);
    return words;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    int answer = ask();
    if (answer || (answer = (int)number(driver, "count_fault", OK)))
        return answer;
    *count = 0;
    for (int i = 0; i < card_count; i++)
        *count += *cards[i] == 'g';
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *found)
{
    int answer = ask();
    return answer ? answer : nth("gpu", 0, index, found);
}

int nvmlDeviceGetHandleByUUID(const char *wanted, device *found)
{
    char uuid[128];
    int answer = ask();
    if (answer)
        return answer;
    for (int i = 0; i < card_count; i++)
        if (!word(cards[i], "uuid", uuid, sizeof uuid) && !strcmp(uuid, wanted)) {
            *found = (char *)0 + i + 1;
            return (int)number(cards[i], "fault", OK);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(device of, char *buffer, unsigned size)
{
    const char *line;
    int answer = ask_of(of, "uuid", &line);
    return answer ? answer : word(line, "uuid", buffer, size);
}

int nvmlDeviceGetName(device of, char *buffer, unsigned size)
{
    const char *line;
    int answer = ask_of(of, "name", &line);
    return answer ? answer : word(line, "name", buffer, size);
}

int nvmlDeviceGetMemoryInfo(device of, memory *info)
{
    const char *line;
    int answer = ask_of(of, "memory", &line);
    double total, free;
    if (answer)
        return answer;
    if ((total = number(line, "total", -1)) < 0)
        return UNSUPPORTED;
    free = total;
    for (int i = 0; i < process_count; i++)
        if (is_on(processes[i], of))
            free -= number(processes[i], "used", 0);
    free = number(line, "free", free < 0 ? 0 : free);
    *info = (memory){(bytes)total, (bytes)free, (bytes)(total - free)};
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(device of, memory_v2 *info)
{
    memory plain;
    int answer = nvmlDeviceGetMemoryInfo(of, &plain);
    if (!answer)
        *info = (memory_v2){info->version, plain.total, 0, plain.free, plain.used};
    return answer;
}

int nvmlDeviceGetComputeMode(device of, int *mode)
{
    const char *line;
    int answer = ask_of(of, "mode", &line);
    if (!answer)
        *mode = (int)number(line, "mode", 0);
    return answer;
}

int nvmlDeviceGetMigMode(device of, unsigned *current, unsigned *pending)
{
    const char *line;
    int answer = ask_of(of, "mig", &line);
    if (!answer && !value(line, "mig"))
        return UNSUPPORTED;
    if (!answer)
        *current = *pending = (unsigned)number(line, "mig", 0);
    return answer;
}

int nvmlDeviceGetMaxMigDeviceCount(device of, unsigned *count)
{
    const char *line;
    int answer = ask_of(of, "mig", &line);
    if (!answer)
        *count = value(line, "mig") ? 7 : 0;
    return answer;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device of, unsigned index, device *found)
{
    const char *line;
    int answer = ask_of(of, "mig", &line);
    return answer ? answer : nth("mig", of - (char *)0, index, found);
}

int nvmlDeviceGetComputeRunningProcesses_v3(device of, unsigned *count, process *infos)
{
    const char *line;
    unsigned room = *count;
    int answer = ask_of(of, "processes", &line);
    if (answer)
        return answer;
    *count = 0;
    for (int i = 0; i < process_count; i++) {
        if (!is_on(processes[i], of))
            continue;
        if (infos && *count < room)
            infos[*count] = (process){
                (unsigned)number(processes[i], "pid", 0), (bytes)number(processes[i], "used", 0), 0, 0};
        if (infos && *count < room && !value(processes[i], "used"))
            infos[*count].used = ~0ULL; /* not available */
        ++*count;
    }
    return *count > room ? TOO_SMALL : OK;
}
