/* The functions of MPI that moec calls, with one interface for every MPI: compiled by `mpicc` for the MPI of this
 * machine. Every function returns 0, or a status of MPI. One thread calls at a time. */

#include <mpi.h>
#include <stdlib.h>

int moec_mpi_begin(int *rank, int *ranks)
{
    int provided = 0;
    int status = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
    if (status == MPI_SUCCESS && provided < MPI_THREAD_SERIALIZED)
        status = MPI_ERR_OTHER;
    if (status == MPI_SUCCESS)
        status = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (status == MPI_SUCCESS)
        status = MPI_Comm_rank(MPI_COMM_WORLD, rank);
    if (status == MPI_SUCCESS)
        status = MPI_Comm_size(MPI_COMM_WORLD, ranks);
    return status;
}

/* Begins to send; `request` is for `moec_mpi_test`. */
int moec_mpi_send(const void *bytes, int count, int to, int tag, void **request)
{
    MPI_Request *own = malloc(sizeof *own);
    if (own == NULL)
        return MPI_ERR_NO_MEM;
    *request = own;
    return MPI_Isend(bytes, count, MPI_BYTE, to, tag, MPI_COMM_WORLD, own);
}

/* Begins to receive a message of at most `count` bytes. */
int moec_mpi_receive(void *bytes, int count, int from, int tag, void **request)
{
    MPI_Request *own = malloc(sizeof *own);
    if (own == NULL)
        return MPI_ERR_NO_MEM;
    *request = own;
    return MPI_Irecv(bytes, count, MPI_BYTE, from, tag, MPI_COMM_WORLD, own);
}

/* Whether a request has ended; it is freed then. */
int moec_mpi_test(void **request, int *done)
{
    int status = MPI_Test(*request, done, MPI_STATUS_IGNORE);
    if (*done || status != MPI_SUCCESS) {
        free(*request);
        *request = NULL;
    }
    return status;
}

/* Bytes of the next message with this tag; -1 while there is none. */
int moec_mpi_probe(int from, int tag, int *bytes)
{
    int there = 0;
    MPI_Status found;
    int status = MPI_Iprobe(from, tag, MPI_COMM_WORLD, &there, &found);
    *bytes = -1;
    if (status == MPI_SUCCESS && there)
        status = MPI_Get_count(&found, MPI_BYTE, bytes);
    return status;
}

int moec_mpi_abort(int code)
{
    return MPI_Abort(MPI_COMM_WORLD, code);
}

int moec_mpi_end(void)
{
    return MPI_Finalize();
}
